// Ranks what the search finds: a section whose heading has the words of the query is first, guides before the reference.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: (result) => {
    const [page, , anchor, , score, , kind] = result;
    const query = new URLSearchParams(window.location.search).get("q");
    if (kind === SearchResultKind.object || kind === SearchResultKind.index)
      return /[A-Z_.(]/.test(query) ? score + 50 : score / 10; // a name of the library, or words of English
    const wanted = Scorer.words(query);
    const file = Search._index.docnames.indexOf(page);
    const title = Scorer.words(Search._index.titles[file]);
    let best = -1;
    for (const [heading, places] of Object.entries(Search._index.alltitles))
      for (const [place, id] of places) {
        if (place !== file || (kind === SearchResultKind.title && (id === null ? "" : "#" + id) !== anchor)) continue;
        const words = Scorer.words(heading);
        const hits = wanted.filter((word) => words.includes(word)).length;
        const inTitle = wanted.filter((word) => !words.includes(word) && title.includes(word)).length;
        const points = (20 * hits + 15 * inTitle) / wanted.length + heading.toLowerCase().includes(query.toLowerCase()) - words.length / 10;
        if (hits === 0 || points <= best) continue;
        best = points;
        result[1] = id === null ? heading : `${Search._index.titles[file]} > ${heading}`;
        result[2] = id === null ? "" : "#" + id;
      }
    if (best < 0) best = page === "howto" ? 1 : 0; // its table leads to the others
    return best + (page.startsWith("generated/") ? 0 : 5);
  },

  words: (text) =>
    splitQuery(text.toLowerCase())
      .filter((word) => !stopwords.has(word))
      .map((word) => new Stemmer().stemWord(word)),
};
